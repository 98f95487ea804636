"""How each quantised type is decoded; `formats.py` is the way in."""
