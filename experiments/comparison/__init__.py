"""`fedgs compare`: every method at every epsilon on every data set, in one table."""
