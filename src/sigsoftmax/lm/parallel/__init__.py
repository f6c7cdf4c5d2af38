"""How one run is divided over processes."""
