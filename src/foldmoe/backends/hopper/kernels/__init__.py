"""Device code: Triton and Gluon, checked by tests instead of by types."""
