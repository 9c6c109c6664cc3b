"""Are quotes true?"""
