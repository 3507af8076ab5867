"""A package of a user's own, which is no part of Echelon: a codec with a knob."""
