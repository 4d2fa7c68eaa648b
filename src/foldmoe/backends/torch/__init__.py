"""Plain torch: every format, any device; the backend of last resort and the one for CPUs."""
