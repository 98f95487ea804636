"""What each command of the command line does; `run(arguments)` returns the exit status."""
