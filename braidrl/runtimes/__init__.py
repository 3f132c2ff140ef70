"""Who decides what runs next: a `for` loop, a controller on Ray, nobody, or a queue."""
