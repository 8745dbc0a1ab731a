#!/bin/sh
cat > /app/paint/brush.py <<'PY'
import warnings


class Brush:
    def __init__(self, width, color=None, *, colour=None):
        if colour is not None:
            if color is not None:
                raise TypeError("give color, not colour as well")
            warnings.warn("colour is now color", DeprecationWarning, stacklevel=2)
            color = colour
        self.width = width
        self.color = "black" if color is None else color

    def stroke(self, length):
        return f"{self.color} stroke of {length} x {self.width}"

    def describe(self):
        return f"a brush from a colour wheel: {self.color}"
PY
sed -i 's/colour=colour/color=color/; s/colour="/color="/; s/{colour}/{color}/' /app/paint/shapes.py
