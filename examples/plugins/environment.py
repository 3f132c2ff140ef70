"""A user-defined environment: it and the model count down in turn."""

from braidrl.agents.turns import Observation


class Countdown:
    """Counts down together with the model."""

    def __init__(self, start: int = 5) -> None:
        self.number = start

    async def reset(self, example):
        return f"Count down with me. {self.number}"

    async def step(self, text):
        right = text.strip() == str(self.number - 1)
        self.number -= 2
        return Observation(str(self.number), reward=float(right), done=not right or self.number <= 1)
