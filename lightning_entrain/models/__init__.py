"""Models as rows of layers, ready to be cut into stages."""
