"""What more knowledge of the engines' prefix caches would gain, in virtual time."""
