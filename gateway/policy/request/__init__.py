"""Read, count and edit a request: headers, JSON body, multipart form."""
