// Prints the answers to a GET and a POST.
package main

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
)

func text(answer *http.Response, err error) string {
	if err == nil {
		var body []byte
		body, err = io.ReadAll(answer.Body)
		if err == nil {
			return string(body)
		}
	}
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
	return ""
}

func main() {
	fmt.Print(text(http.Get(os.Args[1])))
	answer, err := http.Post(os.Args[2], "text/plain", strings.NewReader(strings.Repeat("x", 100000)))
	fmt.Println(text(answer, err), answer.Proto)
}
