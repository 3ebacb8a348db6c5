package main

import (
	"cmp"
	"encoding/json/jsontext"
	"encoding/json/v2"
	"errors"
	"fmt"
	"time"

	"baton/doctor"
)

// doctorCmd looks at servers, whoever made them.
type doctorCmd struct {
	clientFlags
	URL           []string      `arg:"" optional:"" placeholder:"URL" help:"Servers to look at: frontends, engines, anything that speaks the OpenAI API."`
	Prefill       []string      `sep:"none" placeholder:"URL" help:"A prefill server of a fleet (again for each)."`
	Decode        []string      `sep:"none" placeholder:"URL" help:"A decode server of a fleet (again for each). A handoff to it is tried."`
	Model         string        `placeholder:"NAME" help:"Model to ask for. Default: the first that each server lists."`
	BootstrapPort int           `default:"8998" help:"Where SGLang's and Mooncake's prefill servers are met, if they do not say."`
	PromptTokens  int           `default:"512" help:"Length of the prompts that are sent."`
	LookOnly      bool          `help:"Send no requests that a model would have to answer."`
	Timeout       time.Duration `default:"60s" help:"Most time for an answer of a model."`
	JSON          bool          `name:"json" help:"Print the report as JSON."`
}

func (c *doctorCmd) Run(env *environment) error {
	header, err := c.header()
	if err != nil {
		return err
	}
	client, err := c.client()
	if err != nil {
		return err
	}
	defer client.CloseIdleConnections()
	report, err := doctor.Run(env.ctx, doctor.Config{
		URLs: c.URL, Prefill: c.Prefill, Decode: c.Decode, Client: client, Header: header, Model: c.Model,
		BootstrapPort: c.BootstrapPort, PromptTokens: c.PromptTokens, LookOnly: c.LookOnly, Timeout: c.Timeout,
	})
	if bad := new(doctor.ConfigError); errors.As(err, &bad) {
		flag := map[string]string{"BootstrapPort": "--bootstrap-port", "PromptTokens": "--prompt-tokens", "Timeout": "--timeout"}[bad.Field]
		return fmt.Errorf("%s: %s", cmp.Or(flag, "URL"), bad.Problem)
	} else if err != nil {
		return err
	}
	if c.JSON {
		if err := json.MarshalWrite(env.stdout, report, jsontext.Multiline(true)); err != nil {
			return err
		}
		fmt.Fprintln(env.stdout)
	} else if err := report.Write(env.stdout); err != nil {
		return err
	}
	switch n := report.Errors(); n {
	case 0:
		return nil
	case 1:
		return errors.New("1 thing is wrong")
	default:
		return fmt.Errorf("%d things are wrong", n)
	}
}
