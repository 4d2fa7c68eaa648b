"""Speed A/B: the same layer in several arms, interleaved, against measured ceilings."""
