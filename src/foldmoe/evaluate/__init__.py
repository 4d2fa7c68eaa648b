"""Accuracy: what tiny-v4 is asked, and how answers are scored."""
