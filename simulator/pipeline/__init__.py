"""The whole pipeline in virtual time: estimate, plan, admit, compress, bind, serve, settle."""
