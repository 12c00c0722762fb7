"""From files as people have them to batches of token ids."""
