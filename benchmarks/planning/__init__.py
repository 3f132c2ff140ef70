"""Predictions of `braid plan` beside what is measured or published: this machine, streaming's ratio, other people's runs, memory."""
