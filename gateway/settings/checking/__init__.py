"""Checks that types cannot express: unique names, ordered windows, sums that must fit.

Each check reads the sections that are valid by themselves and adds its problems to the document,
so one bad section does not hide problems of the others. Items are located by their index.
"""
