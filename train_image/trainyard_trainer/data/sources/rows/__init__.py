"""Tables of any columns whose rows are read at random, for runs with the user's own recipe."""
