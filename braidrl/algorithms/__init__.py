"""Pure functions on flat tensors and offsets: everything that a paper calls the algorithm. Imports only torch."""
