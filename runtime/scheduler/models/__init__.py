"""Models and versions of models that come and go while others are served."""
