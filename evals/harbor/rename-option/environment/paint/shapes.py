from paint.brush import Brush


def square(side, *, colour="red"):
    brush = Brush(1, colour=colour)
    return [brush.stroke(side) for _ in range(4)]


def circle(radius, *, colour="blue", filled=False):
    kind = "disc" if filled else "ring"
    return f"{kind} of radius {radius} in the colour {colour}"
