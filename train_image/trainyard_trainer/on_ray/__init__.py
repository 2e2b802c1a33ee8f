"""Everything that imports Ray, except the Ray loader: the driver, its callbacks, the connection to Ray."""
