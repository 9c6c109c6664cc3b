"""Are proofs of changes true?"""
