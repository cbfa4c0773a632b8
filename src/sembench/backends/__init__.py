"""The servers that a live run can speak to. A backend translates; it counts nothing and decides nothing."""
