"""The files of the playground: a page without anything from elsewhere. specwire.http.playground serves them."""
