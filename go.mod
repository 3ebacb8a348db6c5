module baton

go 1.27.3
