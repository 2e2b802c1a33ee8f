"""Why a run does not do what it should: one scene in, one cause and one remedy out. Knows no cluster."""
