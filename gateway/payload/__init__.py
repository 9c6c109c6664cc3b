"""The bytes of requests and answers: read, counted, edited, recognised."""
