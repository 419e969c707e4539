"""From a source to the catalogue: what is cut, checked and written."""
