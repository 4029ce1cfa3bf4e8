"""The canonical values of the last sealed version in host memory, and how a start restores them."""
