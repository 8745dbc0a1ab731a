class Brush:
    def __init__(self, width, colour="black"):
        self.width = width
        self.colour = colour

    def stroke(self, length):
        return f"{self.colour} stroke of {length} x {self.width}"

    def describe(self):
        return f"a brush from a colour wheel: {self.colour}"
