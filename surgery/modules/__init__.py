"""Components as torch modules, and any stored model as a stack of them."""
