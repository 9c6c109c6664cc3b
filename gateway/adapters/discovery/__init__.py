"""Sources of engines at run time, and the task that applies what they say."""
