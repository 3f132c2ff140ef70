"""Side-by-side measurements of Braid and its peers: `make bench`, or `make bench ONLY=decode`."""
