"""What does a client do with its submodel? Hooks around the user's own steps that several methods may use."""
