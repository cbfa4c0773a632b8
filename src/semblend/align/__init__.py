"""Which tokens correspond, and which spans together save most prefill."""
