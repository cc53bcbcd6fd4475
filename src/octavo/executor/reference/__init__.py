"""The executor in numpy: what each op means, one op after the other."""
