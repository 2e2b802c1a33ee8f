"""Commands about run files. None of them changes anything on a cluster."""
