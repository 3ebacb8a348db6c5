package text

import (
	"context"
	"encoding/json/jsontext"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode"

	"github.com/ardanlabs/jinja"
)

// DefaultTemplate is the name of the template that is used when none is asked for.
const DefaultTemplate = "default"

// Template is a compiled chat template. It is immutable and safe for concurrent use.
type Template struct {
	name      string
	source    string
	compiled  *jinja.Template
	tokens    map[string]jinja.Value // bos_token, eos_token, ...
	protected *byteTrie
	sourceUse map[rune]bool // characters of the marks' plane in the source
	traits    func() traits
	needles   []string    // strings that it looks for in messages
	mutates   bool        // it may change its variables
	local     func() bool // what it shows of a message depends on few others (see window)
	calls     calls       // how it writes calls, as far as that was asked
}

// Chat is what a template renders. The JSON values keep the order of their names.
type Chat struct {
	Messages  []byte // JSON array of messages
	Tools     []byte // JSON array; empty is none
	Documents []byte // likewise
	Extra     []byte // JSON object of further arguments (chat_template_kwargs); empty is none
	// AddGenerationPrompt asks for the beginning of the assistant's answer.
	AddGenerationPrompt bool
	// ContinueFinalMessage leaves the last message open: what follows its content is cut off, so that the
	// answer goes on with it. It excludes AddGenerationPrompt.
	ContinueFinalMessage bool
	// Now is what strftime_now formats; zero is the time of the call.
	Now time.Time
}

const (
	maxRendered   = 64 << 20 // bytes
	maxGuardCalls = 1 << 20  // loop turns and macro calls of one rendering
	maxGuardDepth = 5000     // Go stack frames: a few hundred levels of macros
	maxTemplates  = 64
)

// templateSet holds a model's templates by name. A template that does not compile keeps its error.
type templateSet struct {
	sources  map[string]string
	tokens   map[string]string
	compiled map[string]*Template
	failed   map[string]error
}

func newTemplateSet(sources, tokens map[string]string, t *Tokenizer) (templateSet, error) {
	if len(sources) > maxTemplates {
		return templateSet{}, fmt.Errorf("tokenizer: more than %d chat templates: %w", maxTemplates, ErrLimit)
	}
	s := templateSet{sources, tokens, map[string]*Template{}, map[string]error{}}
	for name, source := range sources {
		compiled, err := t.compileTemplate(name, source, tokens)
		if err != nil {
			s.failed[name] = err
		} else {
			s.compiled[name] = compiled
		}
	}
	return s, nil
}

// Template gives the model's template of a name; empty is the default one, or the only one. It gives
// ErrNoTemplate if there is none, a TemplateError if it cannot be compiled.
func (t *Tokenizer) Template(name string) (*Template, error) {
	if name == "" {
		name = DefaultTemplate
		if len(t.templates.sources) == 1 {
			for only := range t.templates.sources {
				name = only
			}
		}
	}
	if err := t.templates.failed[name]; err != nil {
		return nil, err
	}
	if compiled := t.templates.compiled[name]; compiled != nil {
		return compiled, nil
	}
	return nil, fmt.Errorf("tokenizer: %q: %w", name, ErrNoTemplate)
}

// TemplateNames lists the model's templates, sorted.
func (t *Tokenizer) TemplateNames() []string {
	names := make([]string, 0, len(t.templates.sources))
	for name := range t.templates.sources {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// NewTemplate compiles another template for this tokenizer, such as one that a user gives. Its errors
// are TemplateErrors.
func (t *Tokenizer) NewTemplate(name, source string) (*Template, error) {
	return t.compileTemplate(name, source, t.templates.tokens)
}

func (t *Tokenizer) compileTemplate(name, source string, tokens map[string]string) (*Template, error) {
	prepared, err := prepareSource(source)
	if err != nil {
		return nil, &TemplateError{Template: name, Message: err.Error(), Err: err}
	}
	compiled, err := jinja.Compile(prepared)
	if err != nil {
		return nil, &TemplateError{Template: name, Message: err.Error(), Err: err}
	}
	tm := &Template{
		name: name, source: source, compiled: compiled,
		tokens: map[string]jinja.Value{}, protected: &byteTrie{}, sourceUse: map[rune]bool{},
	}
	for role, text := range tokens {
		tm.tokens[role] = jinja.NewString(text)
	}
	for i, text := range t.protected {
		tm.protected.insert(text, int32(i))
	}
	m := marker{clash: tm.sourceUse}
	m.text(source)
	tm.traits = sync.OnceValue(tm.probe)
	tm.needles, tm.mutates = needles(source), mutators.MatchString(source)
	tm.local = sync.OnceValue(func() bool { return tm.tryWindows(t) })
	return tm, nil
}

// Source is the template as its file has it.
func (tm *Template) Source() string { return tm.source }

// Render renders a chat. A refusal by the template, a fault in it, or JSON that cannot be read is a
// TemplateError; ctx and the package's limits bound the work.
//
// Three things depend on what the template can take. Lists of text parts as content are joined by line
// breaks for a template that knows only strings. Tool-call arguments, which clients send as a string of
// JSON, are decoded for a template that formats them itself. Content that is empty beside tool calls is null or the empty
// string, whichever the template shows calls with.
func (tm *Template) Render(ctx context.Context, c Chat) (Prompt, error) {
	m, vars, err := tm.decode(c)
	if err != nil {
		return Prompt{}, tm.failure(err)
	}
	if !c.ContinueFinalMessage {
		text, err := tm.execute(ctx, vars, c.Now)
		return unmark(text, m.mark), err
	}
	tag, err := newMark(tm.sourceUse, m.clash, map[rune]bool{[]rune(m.mark)[0]: true})
	if err == nil && c.AddGenerationPrompt {
		err = errors.New("continue_final_message and add_generation_prompt exclude each other")
	}
	if err == nil {
		err = tagFinalMessage(vars["messages"], tag+" ")
	}
	if err != nil {
		return Prompt{}, tm.failure(err)
	}
	text, err := tm.execute(ctx, vars, c.Now)
	if err != nil {
		return Prompt{}, err
	}
	text, err = cutFinalMessage(text, tag)
	if err != nil {
		return Prompt{}, tm.failure(err)
	}
	return unmark(text, m.mark), nil
}

// decode makes a template's variables, marked and adapted.
func (tm *Template) decode(c Chat) (*marker, map[string]jinja.Value, error) {
	m := &marker{protected: tm.protected, clash: map[rune]bool{}}
	var err error
	if m.mark, err = newMark(tm.sourceUse); err != nil {
		return nil, nil, err
	}
	vars, err := tm.variables(c, m)
	if err == nil && m.clash[[]rune(m.mark)[0]] {
		if m.mark, err = newMark(tm.sourceUse, m.clash); err == nil {
			vars, err = tm.variables(c, m)
		}
	}
	if err != nil {
		return nil, nil, err
	}
	tm.adapt(vars["messages"], m)
	return m, vars, nil
}

// tagFinalMessage puts a tag at the end of the last message's text.
func tagFinalMessage(messages jinja.Value, tag string) error {
	items := messages.AsList().Items
	if len(items) == 0 || !items[len(items)-1].IsDict() {
		return errors.New("continue_final_message: there is no message to continue")
	}
	holder, key := items[len(items)-1].AsDict(), "content"
	content, _ := holder.Get(key)
	if content.IsList() && content.AsList().Len() > 0 {
		if last := content.AsList().Get(content.AsList().Len() - 1); last.IsDict() {
			holder, key = last.AsDict(), "text"
			content, _ = holder.Get(key)
		}
	}
	if !content.IsString() || strings.TrimSpace(content.AsString()) == "" {
		return errors.New("continue_final_message: the last message has no text to continue")
	}
	holder.Set(key, jinja.NewString(content.AsString()+tag))
	return nil
}

// cutFinalMessage cuts a rendered chat at the tag. A template that strips white space around contents has
// stripped the tag's space as well, and would have stripped what is before the tag.
func cutFinalMessage(text, tag string) (string, error) {
	i := strings.LastIndex(text, tag)
	if i < 0 {
		return "", errors.New("continue_final_message: the template does not show the last message")
	}
	if strings.HasPrefix(text[i+len(tag):], " ") {
		return text[:i], nil
	}
	return strings.TrimRightFunc(text[:i], unicode.IsSpace), nil
}

func (tm *Template) failure(err error) error {
	return &TemplateError{Template: tm.name, Message: err.Error(), Err: err}
}

// variables gives what the template sees: as in transformers, absent tools and documents are none.
func (tm *Template) variables(c Chat, m *marker) (map[string]jinja.Value, error) {
	vars := map[string]jinja.Value{}
	for role, text := range tm.tokens {
		vars[role] = text
	}
	if len(c.Extra) > 0 {
		extra, err := decodeValue(c.Extra, m.text)
		if err != nil {
			return nil, fmt.Errorf("template arguments: %w", err)
		}
		if !extra.IsDict() {
			return nil, errors.New("template arguments: want an object")
		}
		for _, name := range extra.AsDict().Keys {
			vars[name] = extra.AsDict().Data[name]
		}
	}
	for _, f := range []struct {
		name string
		raw  []byte
	}{{"messages", c.Messages}, {"tools", c.Tools}, {"documents", c.Documents}} {
		vars[f.name] = jinja.None()
		if len(f.raw) == 0 && f.name != "messages" {
			continue
		}
		v, err := decodeValue(f.raw, m.text)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", f.name, err)
		}
		if !v.IsList() && !(v.IsNone() && f.name != "messages") {
			return nil, fmt.Errorf("%s: want an array", f.name)
		}
		vars[f.name] = v
	}
	vars["add_generation_prompt"] = jinja.NewBool(c.AddGenerationPrompt)
	return vars, nil
}

// execute runs the template with its functions and limits.
func (tm *Template) execute(ctx context.Context, vars map[string]jinja.Value, now time.Time) (string, error) {
	if now.IsZero() {
		now = time.Now()
	}
	g := guard{ctx: ctx}
	var raised *string
	vars[guardName] = jinja.NewCallable(guardName, g.call)
	vars["range"] = jinja.NewCallable("range", g.rangeList)
	vars["raise_exception"] = jinja.NewCallable("raise_exception", func(args []jinja.Value, _ map[string]jinja.Value) (jinja.Value, error) {
		message := ""
		if len(args) > 0 && args[0].IsString() {
			message = args[0].AsString()
		}
		raised = &message
		return jinja.Undefined(), errors.New(message)
	})
	vars["strftime_now"] = jinja.NewCallable("strftime_now", func(args []jinja.Value, _ map[string]jinja.Value) (jinja.Value, error) {
		if len(args) != 1 || !args[0].IsString() {
			return jinja.Undefined(), errors.New("strftime_now: want one format")
		}
		return jinja.NewString(strftime(now, args[0].AsString())), nil
	})
	text, err := tm.compiled.RenderValues(vars)
	switch {
	case g.err != nil:
		return "", tm.failure(g.err)
	case raised != nil:
		return "", &TemplateError{Template: tm.name, Raised: true, Message: *raised}
	case err != nil:
		return "", tm.failure(err)
	case len(text) > maxRendered:
		return "", tm.failure(fmt.Errorf("output is larger than %d MiB: %w", maxRendered>>20, ErrLimit))
	}
	return validUTF8(text), nil
}

// guard is called in each turn of a loop and each macro call.
type guard struct {
	ctx   context.Context
	calls int
	err   error
}

func (g *guard) call(args []jinja.Value, _ map[string]jinja.Value) (jinja.Value, error) {
	if len(args) > 0 {
		var frame [1]uintptr
		if runtime.Callers(maxGuardDepth, frame[:]) > 0 {
			g.err = fmt.Errorf("macros or loops call themselves too deeply: %w", ErrLimit)
		}
	}
	return jinja.None(), g.spend(1)
}

func (g *guard) spend(n int) error {
	if g.err != nil {
		return g.err
	}
	g.calls += n
	if g.calls > maxGuardCalls {
		g.err = fmt.Errorf("more than %d loop turns: %w", maxGuardCalls, ErrLimit)
	} else if g.calls%64 == 0 || n > 1 {
		g.err = g.ctx.Err()
	}
	return g.err
}

// rangeList is Python's range, as a list of bounded length.
func (g *guard) rangeList(args []jinja.Value, _ map[string]jinja.Value) (jinja.Value, error) {
	bounds := [3]int64{0, 0, 1}
	for i, a := range args {
		if !a.IsInt() || i == 3 {
			return jinja.Undefined(), errors.New("range: want one to three integers")
		}
		bounds[i] = a.AsInt()
	}
	start, stop, step := bounds[0], bounds[1], bounds[2]
	if len(args) == 1 {
		start, stop = 0, start
	}
	if len(args) == 0 || step == 0 {
		return jinja.Undefined(), errors.New("range: want one to three integers, the step not zero")
	}
	var items []jinja.Value
	for i := start; step > 0 && i < stop || step < 0 && i > stop; i += step {
		if len(items) >= maxGuardCalls {
			g.err = fmt.Errorf("range of more than %d: %w", maxGuardCalls, ErrLimit)
			return jinja.Undefined(), g.err
		}
		items = append(items, jinja.NewInt(i))
		if step > 0 && i > i+step || step < 0 && i < i+step {
			break // it would overflow
		}
	}
	return jinja.NewList(items), g.spend(len(items) + 1)
}

// loadTemplates collects a folder's templates: from tokenizer_config.json, chat_template.json,
// chat_template.jinja and additional_chat_templates; later ones replace earlier ones of the same name.
func (c *configs) loadTemplates(dir string, t *Tokenizer) (templateSet, error) {
	sources := map[string]string{}
	file := filepath.Join(dir, "tokenizer_config.json")
	if err := readTemplates(c.tokenizer.ChatTemplate, sources); err != nil {
		return templateSet{}, &FileError{file, "chat_template", err}
	}
	file = filepath.Join(dir, "chat_template.json")
	var legacy struct {
		ChatTemplate jsontext.Value `json:"chat_template"`
	}
	if err := readConfig(file, &legacy); err != nil {
		return templateSet{}, err
	}
	if err := readTemplates(legacy.ChatTemplate, sources); err != nil {
		return templateSet{}, &FileError{file, "chat_template", err}
	}
	files := map[string]string{DefaultTemplate: filepath.Join(dir, "chat_template.jinja")}
	more, err := os.ReadDir(filepath.Join(dir, "additional_chat_templates"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return templateSet{}, &FileError{dir, "additional_chat_templates", err}
	}
	for _, e := range more {
		if name, ok := strings.CutSuffix(e.Name(), ".jinja"); ok {
			files[name] = filepath.Join(dir, "additional_chat_templates", e.Name())
		}
	}
	for name, file := range files {
		data, err := readLimited(file, maxConfigFile)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		} else if err != nil {
			return templateSet{}, &FileError{file, "", err}
		}
		sources[name] = string(data)
	}
	tokens := map[string]string{}
	for _, role := range c.tokenizer.roles() {
		if *role.text != "" {
			tokens[role.name] = string(*role.text)
		}
	}
	return newTemplateSet(sources, tokens, t)
}

// readTemplates reads a chat_template field: null, one template, or a list of named ones.
func readTemplates(raw jsontext.Value, into map[string]string) error {
	if isNull(raw) {
		return nil
	}
	if raw.Kind() == '"' {
		var source string
		err := unmarshal(raw, &source)
		into[DefaultTemplate] = source
		return err
	}
	var list []struct {
		Name     string `json:"name"`
		Template string `json:"template"`
	}
	if err := unmarshal(raw, &list, readOptions); err != nil {
		return err
	}
	for _, l := range list {
		into[l.Name] = l.Template
	}
	return nil
}
