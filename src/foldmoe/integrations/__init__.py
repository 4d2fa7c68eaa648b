"""The only files that know an engine exists."""
