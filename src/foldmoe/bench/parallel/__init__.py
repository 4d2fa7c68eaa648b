"""``foldmoe bench parallel``: one layer over all ranks, phase by phase."""
