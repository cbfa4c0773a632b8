"""Who might have it: the donor store, its index, and the evidence beside them."""
