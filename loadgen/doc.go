// Package loadgen puts load on servers that speak OpenAI's HTTP API and measures what their clients would see: time to
// first token, time between tokens, throughput, prefix hits, errors.
//
// A Plan says what is asked: sessions of one or more turns, made up from a seed (Synthetic) or read from a file (Trace). A
// Load says when: so many at a time (closed loop), or at times that do not depend on the answers (open loop). Run plays a
// plan against one target, or against two in alternating rounds, and returns a Report.
//
// # What is measured from when
//
// In an open loop a request's times count from the moment at which it was meant to be sent, not from when this process got
// around to it: a server that stalls delays the requests behind the stall too, and a generator that waits with it would
// leave them out of its percentiles. In a closed loop the two moments are one.
//
// Tokens are counted by the server's usage object, failing that by token ids that come with the events, and only failing
// both by events. The report says which.
//
// # Goroutines
//
// One for each request (closed loop: for each of the sessions that run at a time) that ends with it, and one that
// watches how late this process wakes up. Run returns after all of them. Nothing else is left behind but
// idle connections of the http.Client, which are closed.
package loadgen
