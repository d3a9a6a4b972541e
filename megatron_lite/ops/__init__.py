"""Operations with more than one implementation, and the rule that picks one: see op.py."""
