"""Sequences cut over ranks: attention, training, Hugging Face models."""
