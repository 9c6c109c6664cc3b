"""Admission: decides whether a request enters, what it is charged, and how long to retry after."""
