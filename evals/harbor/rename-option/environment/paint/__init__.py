from paint.brush import Brush
from paint.shapes import circle, square

__all__ = ["Brush", "circle", "square"]
