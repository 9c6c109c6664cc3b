"""May a request enter, what does it pay, and how long does a refused one wait?"""
