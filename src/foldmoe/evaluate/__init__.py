"""Accuracy A/B: who is asked what, how answers are scored, and what the difference between two arms may mean."""
