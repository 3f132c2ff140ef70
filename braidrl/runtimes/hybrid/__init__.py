"""The hybrid runtime: a driver that holds handles, and workers on Ray that hold the rows."""
