"""What a tokenizer and a chat template are made of; the ways in: `tokenizer.py`, `chat.py`."""
