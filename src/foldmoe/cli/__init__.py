"""The command line: one file a command; it parses, calls and prints."""
